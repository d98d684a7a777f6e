"""Reports of a real run: what the trainer records for them, and that charts and tables are made of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dither import checkpoint, report


@pytest.fixture(scope="module")
def section(report_run):
    return report.Report([report.read(report_run)]).sections[0]


def metrics(run: Path, kind: str) -> list[dict]:
    return [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if line["kind"] == kind]


def test_seconds_of_all_parts_are_those_of_the_run(report_run):
    spent = [line["parts"] for line in metrics(report_run, "seconds")]
    total = sum(seconds for parts in spent for seconds in parts.values())
    begin, end = metrics(report_run, "start")[0]["time"], metrics(report_run, "end")[0]["time"]
    assert begin < total <= end + 0.05
    assert total > 0.9 * (end - begin)
    assert {name for parts in spent for name in parts} == {
        *("forward", "backward", "optimizer", "casts of weights", "rest of training"),
        *("evaluation", "checkpoints", "samples", "monitor", "choice of precision"),
    }
    steps = {name: sum(parts.get(name, 0.0) for parts in spent) for name in ("forward", "backward", "optimizer")}
    assert steps["backward"] > steps["forward"] / 2 > 0
    assert steps["optimizer"] > 0


def test_memory_of_the_parts(report_run):
    (line,) = metrics(report_run, "memory")
    tensors, _ = checkpoint.load(checkpoint.newest(report_run / "checkpoints")[0])
    parameters = json.loads((report_run / "environment.json").read_text())["parameters"]
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    assert line["parts"]["weights"] == sum(size for name, size in sizes.items() if name.startswith("model"))
    assert line["parts"]["gradients"] == line["parts"]["weights"]
    assert line["parts"]["optimizer states"] >= 2 * 4 * parameters


def test_bitwidths_are_recorded_as_they_are(report_run, section):
    blocks = json.loads((report_run / "bitwidths.json").read_text())
    layers = metrics(report_run, "bitwidths")[-1]["layers"]
    assert blocks["step"] == 8
    assert list(blocks["layers"]) == list(layers)
    for name, each in layers.items():
        rows = blocks["layers"][name]["values"]
        values = [value for row in rows for value in row]
        assert [len(rows), len(rows[0])] == blocks["layers"][name]["blocks"]
        assert each["mean"] == pytest.approx(sum(values) / len(values), abs=1e-3)  # all blocks are whole
        assert (each["min"], each["max"]) == (pytest.approx(min(values), abs=1e-3), pytest.approx(max(values), abs=1e-3))
        assert sum(share for _, share in each["bins"]) == pytest.approx(1)
        assert each["bins"][0][0] <= each["min"] < each["bins"][0][0] + 0.25
        assert sum(each["formats"].values()) == pytest.approx(1)
    total = sum(each["weights"] for each in layers.values())
    mean = sum(each["mean"] * each["weights"] for each in layers.values()) / total
    assert section.bitwidths.mean == pytest.approx(mean)


def test_the_plan_in_force_is_on_the_frontier_or_above(report_run, section):
    last = metrics(report_run, "plan")[-1]
    said = last["plan"]["provenance"]
    least, chosen = section.snip.frontier.lines
    assert chosen.x["share saved"][0] == pytest.approx(said["efficiency"])
    assert chosen.y[0] == pytest.approx(said["harm"], rel=1e-6)
    below = max(y for x, y in zip(least.x["share saved"], least.y, strict=True) if x <= chosen.x["share saved"][0] + 1e-9)
    assert chosen.y[0] >= below - 1e-15
    assert section.snip.frontier.marks == ((0.5, "target 0.5"),)


def test_reasons_have_every_layer_once_and_its_option(report_run, section):
    last = metrics(report_run, "plan")[-1]
    rows = {row[0]: row for row in section.snip.reasons.rows}
    assert set(rows) == set(last["scores"]["layers"])
    for name, at in zip(last["scores"]["layers"], last["choice"]["chosen"], strict=True):
        assert rows[name][1] == last["scores"]["options"][at]
    wide = [row for row in rows.values() if row[1] == "fp8/fp8/fp8"]
    assert all("kept wide" in row[5] for row in wide)


def test_stages_of_the_pipeline_take_what_their_layers_cost(report_run, section):
    last = metrics(report_run, "plan")[-1]
    costs = [row[at] for row, at in zip(last["choice"]["costs"], last["choice"]["chosen"], strict=True)]
    works = [
        sum(cost for cost, name in zip(costs, last["scores"]["layers"], strict=True) if f"layers.{n}." in name) for n in (0, 1)
    ]
    spans = [row[1] for row in section.snip.pipeline.rows]
    busy = [sum(end - begin for begin, end, _, _ in row) for row in spans]
    assert busy[0] / busy[1] == pytest.approx(works[0] / works[1])


def test_a_report_of_this_version_needs_no_torch(report_run, tmp_path):
    """A page is written in a second, not after the seconds that torch takes to load."""
    code = "import sys, dither.report as r; r.write([sys.argv[1]], sys.argv[2]); print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(report.__file__).parents[2])}
    arguments = [sys.executable, "-c", code, str(report_run), str(tmp_path / "page.html")]
    assert subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment).stdout == "False\n"


def test_a_run_of_an_earlier_version_shows_the_same_choices(report_run, section, tmp_path):
    """Without the new lines and fields, savings are computed again; what was never recorded is left out."""
    old = tmp_path / "old"
    old.mkdir()
    for name in ("config.toml", "plan.json", "conversion.json", "environment.json", "status.json"):
        (old / name).write_bytes((report_run / name).read_bytes())
    kept = []
    for line in map(json.loads, (report_run / "metrics.jsonl").read_text().splitlines()):
        if line["kind"] in ("seconds", "memory"):
            continue
        if line["kind"] == "bitwidths":
            for each in line["layers"].values():
                for key in ("weights", "deviation", "bins", "formats"):
                    del each[key]
        kept.append({key: value for key, value in line.items() if key not in ("changed", "choice", "where")})
    (old / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    found = report.Report([report.read(old)]).sections[0]
    assert found.missing == ()
    assert found.snip.frontier == section.snip.frontier
    assert found.snip.reasons == section.snip.reasons
    assert [state.cells for state in found.plans.states] == [state.cells for state in section.plans.states]
    assert found.part_charts == ()
    assert not any(found.bitwidths.blocks)
