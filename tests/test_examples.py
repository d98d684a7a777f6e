"""The examples, shortened: they run, print what their headers promise, draw, and show what their pages say."""

import contextlib
import importlib
import re
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from worlds import environment, free_port, needs_gloo, start, wait

ROOT = Path(__file__).parent.parent
FIGURES = {"int8": "int8.svg", "fp16_underflow": "fp16-underflow.svg", "fp8_scaling": "fp8-scaling.svg"}


@pytest.fixture(autouse=True)
def _beside_the_examples(monkeypatch):
    """The examples share a module, which lies beside them."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.parametrize("name", FIGURES)
def test_an_example_runs_and_draws(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", "16", "--plot", str(tmp_path / "figure.svg")])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    ElementTree.parse(tmp_path / "figure.svg")
    assert "figure: " in capsys.readouterr().out


@pytest.mark.parametrize("name", FIGURES)
def test_a_page_has_its_example_and_its_figure(name):
    """The figure in docs/ is a whole SVG that the page shows, by the command that the page gives."""
    figure = ROOT / "docs" / FIGURES[name]
    ElementTree.parse(figure)
    assert figure.stat().st_size < 100_000
    (page,) = [path for path in (ROOT / "docs").glob("*.md") if f"]({figure.name})" in path.read_text()]
    assert f"python examples/{name}.py --plot docs/{figure.name}\n" in page.read_text()
    assert f"--plot docs/{figure.name}" in (ROOT / "examples" / f"{name}.py").read_text()
    assert re.search(rf"docs/{page.name}", (ROOT / "examples" / f"{name}.py").read_text())


def test_one_outlier_empties_a_tensor_and_a_row():
    int8 = importlib.import_module("int8")
    x = torch.ones(4, 64)
    x[0, 0] = 300.0
    assert int8.flushed(x, "int8 tensor") == 255 / 256
    assert int8.flushed(x, "int8 row") == 63 / 256
    assert int8.flushed(x, "e4m3 tensor") == 0.0


def test_what_fp16_loses_and_which_scales_do():
    fp16 = importlib.import_module("fp16_underflow")
    x = torch.tensor([[2.0**-25, 2.0**-24, 3 * 2.0**-26, 1.0]])  # half the smallest value goes to zero, three quarters do not
    assert fp16.flushed(x, 1.0) == 0.25
    assert fp16.lost(x, 1.0) == pytest.approx(2.0**-25, rel=1e-6)
    assert (fp16.sufficient(x), fp16.largest(x)) == (0, 15)
    assert fp16.sufficient(torch.full((1, 1), 2.0**-30)) == 6  # 2^-24
    assert fp16.overflowed(x, 2.0**15) == 0
    assert fp16.overflowed(x, 2.0**16) == 0.25
    largest = torch.tensor([[65519.0, 65520.0]])
    assert largest.half().isinf().tolist() == [[False, True]]
    assert fp16.overflowed(largest, 1.0) == 0.5


def test_delayed_scaling_clips_what_grows_and_nothing_else():
    fp8 = importlib.import_module("fp8_scaling")
    series = fp8.tensors(fp8.JUMP + 3)
    relative, clipped = fp8.errors("e4m3 tensor delayed(16)", series)
    assert clipped[fp8.JUMP] > 0.5
    assert relative[fp8.JUMP] > 0.5
    assert max(relative[: fp8.JUMP] + relative[fp8.JUMP + 1 :]) < 0.04
    assert fp8.errors("e4m3 tensor", series)[1] == [0.0] * len(series)


TRAINING = {"huggingface": ["--steps", "3"], "own_loop_snip": ["--steps", "6"], "gaussws": ["--steps", "4"]}
"""Examples that train a model, and arguments that make them short."""


def _losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss (\d+\.\d+) nats per token", text, flags=re.MULTILINE)]


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_example_learns(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *TRAINING[name]])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    losses = _losses(out)
    assert losses[-1] < losses[0] < 6
    expected = {
        "huggingface": "loaded back without dither: weights equal",
        "own_loop_snip": "step 4: a plan from the statistics of step 2",
        "gaussws": "FP4 everywhere: 4.0 bits per weight, held-out loss ",
    }
    assert expected[name] in out


def _fsdp2(rank: int, port: int, folder: Path) -> None:
    """Run the example as torchrun would start it, with the folder of the examples in front of the path."""
    environment(rank, 2, port)
    sys.path.insert(0, str(ROOT / "examples"))
    sys.argv = ["fsdp2.py", "--steps", "2"]
    with (folder / f"{rank}.txt").open("w") as said, contextlib.redirect_stdout(said):
        runpy.run_path(str(ROOT / "examples" / "fsdp2.py"), run_name="__main__")


@needs_gloo
def test_fsdp2_on_two_ranks(tmp_path):
    wait(start(_fsdp2, (free_port(), tmp_path), 2))
    out = (tmp_path / "0.txt").read_text()
    losses = _losses(out)
    assert len(losses) == 2
    assert losses[-1] < losses[0]
    assert "2 ranks" in out
    assert (tmp_path / "1.txt").read_text() == ""


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_every_example_says_how_to_run_it(path):
    header = path.read_text().split('"""')[1]
    if path.stem not in ("text", "toy"):  # these are imported by the others
        assert re.search(rf"^    (python|torchrun .*) ?examples/{path.name}", header, flags=re.MULTILINE)
