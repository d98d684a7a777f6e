"""`dither formats --plot`: number lines whose drawn marks are the values of the formats."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dither import cli
from dither.report.charts import format_colour
from dither.report.figures import number_line
from dither.spec.formats import TABLE, Format

NAMES = [format.name for format in TABLE.values() if format.bits <= 8]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The file of all formats: {id: (colours, x positions of the marks)}."""
    path = tmp_path_factory.mktemp("plot") / "all.svg"
    assert cli.main(["formats", "--plot", str(path)]) == 0
    found = {}
    for group in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}g"):
        if re.match("(linear|log|subnormal)-", group.get("id", "")):
            paths = list(group.iter("{http://www.w3.org/2000/svg}path"))
            marks = [re.match(r"M ([\d.]+) [\d.]+ *\s*L ([\d.]+)", each.get("d")) for each in paths]
            assert all(mark[1] == mark[2] for mark in marks)
            styles = {re.search("stroke: (#[0-9a-f]+)", each.get("style"))[1] for each in paths}
            found[group.get("id")] = styles, [float(mark[1]) for mark in marks]
    return found


def affine(name, positions, values):
    """Assert that drawn positions are the values, moved and scaled."""
    assert len(positions) == len(values), name
    scale = (positions[-1] - positions[0]) / (values[-1] - values[0])
    expected = [positions[0] + scale * (value - values[0]) for value in values]
    assert positions == pytest.approx(expected, abs=0.01), name


@pytest.mark.parametrize("name", NAMES)
def test_marks_are_the_values_in_the_colour_of_the_format(drawn, name):
    format = Format.parse(name)
    values = format.values()
    colours, positions = drawn[f"linear-{name}"]
    assert colours == {format_colour(name)}
    affine(name, positions, values)
    logs = [math.log2(value) for value in values if value > 0]
    subnormal = [x for x in logs if not format.is_integer and x < math.log2(format.min_normal)]
    normal = [x for x in logs if x not in subnormal]
    if name == "e8m0":  # wider than the axis
        normal = [x for x in normal if -18 < x < 17.5]
    positions = [*drawn.get(f"subnormal-{name}", ((), []))[1], *drawn[f"log-{name}"][1]]
    affine(name, positions, [*subnormal, *normal])
    assert len(drawn.get(f"subnormal-{name}", ((), []))[1]) == len(subnormal)


def test_drawing_shows_that_it_has_begun_before_matplotlib_is_imported(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise SystemExit('matplotlib is imported')\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(cli.__file__).parent.parent}"}
    command = [sys.executable, "-m", "dither", "formats", "e4m3", "--plot", str(tmp_path / "a.svg")]
    ended = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ended.stderr.splitlines() == ["Drawing number lines ...", "matplotlib is imported"]
    assert ended.stdout == ""


def test_all_formats_share_the_logarithmic_axis(drawn):
    at = {name: drawn[f"log-{name}"][1][-1] for name in ("e4m3", "e5m2", "int8", "int4")}
    unit = (at["e5m2"] - at["int4"]) / math.log2(57344 / 7)
    assert (at["e4m3"] - at["int4"]) / unit == pytest.approx(math.log2(448 / 7), abs=1e-3)
    assert (at["int8"] - at["int4"]) / unit == pytest.approx(math.log2(127 / 7), abs=1e-3)


def test_long_formats_are_bands_with_their_ranges(drawn):
    assert not any(f"linear-{name}" in drawn for name in ("fp32", "fp16", "bf16"))
    assert number_line(Format.parse("fp16")).about == "2^-24 to 65504, 1,024 per binade"
    assert number_line(Format.parse("e8m0")).about == "2^-127 to 2^127, 1 per binade"
    assert number_line(Format.parse("int8")).about == "1 to 127"


def test_files_and_their_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["formats", "e2m1", "--plot"]) == 0
    assert cli.main(["formats", "e4m10", "--plot", "a.PNG"]) == 0
    assert capsys.readouterr().out == "e2m1.svg\na.PNG\n"
    assert (tmp_path / "a.PNG").read_bytes()[:4] == b"\x89PNG"
    first = (tmp_path / "e2m1.svg").read_bytes()
    assert cli.main(["formats", "e2m1", "--plot"]) == 0
    assert (tmp_path / "e2m1.svg").read_bytes() == first
    wrong = {
        ("--plot", "x.pdf"): ".svg or .png",
        ("--plot", "a.svg", "b.svg"): "one file, not 2",
        ("e9", "--plot"): "no number format",
        ("--plot", "e2m1.svg/a.svg"): "cannot be written",
    }
    for arguments, words in wrong.items():
        capsys.readouterr()
        assert cli.main(["formats", *arguments]) == 2
        assert words in capsys.readouterr().err
