"""The script that compares sampled with plain training runs as its page says, on a CPU in seconds; nothing here is a result."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parent.parent / "benchmarks" / "sampling_quality.py"


@pytest.fixture
def quality(monkeypatch):
    """The script as a function of its arguments."""
    spec = importlib.util.spec_from_file_location("sampling_quality", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", [str(PATH), *map(str, arguments)])
        module.main()

    run.module = module
    return run


def test_runs_are_paired_written_down_and_not_repeated(quality, tmp_path, capsys):
    path = tmp_path / "quality.json"
    arms = "bf16,gaussws:all,diffq:od/3@fp8-block,auto:all,inputs:all,both:od"
    quality("--device", "cpu", "--tiny", "--json", path, "--seeds", "0")
    first = json.loads(path.read_text())
    assert [run["arm"] for run in first] == arms.split(",")
    quality("--device", "cpu", "--tiny", "--json", path)
    both = json.loads(path.read_text())
    assert both[:6] == first
    assert [(run["arm"], run["seed"]) for run in both[6:]] == [(arm, 1) for arm in arms.split(",")]
    for run in both:
        assert all(np.isfinite([run["loss"], run["operator_loss"], run["train_loss"], *run["cast"].values()]))
        assert len(run["cast"]) == 12
    by_arm = {run["arm"]: run for run in first}
    assert "b_t" not in by_arm["bf16"]
    # 1 % of the way from 6 to 4, and from 5 to 3, is left, give or take what six steps of the optimizer do.
    assert by_arm["gaussws:all"]["b_t"]["mean"] == pytest.approx(4.02, abs=2 * 6e-3)
    assert by_arm["diffq:od/3@fp8-block"]["b_t"]["mean"] == pytest.approx(3.02, abs=2 * 6e-3)
    assert by_arm["auto:all"]["b_t"]["mean"] == pytest.approx(4.02, abs=2 * 6e-3)
    assert by_arm["inputs:all"]["b_t"]["mean"] == pytest.approx(4.02, abs=2 * 6e-3)
    assert len(by_arm["diffq:od/3@fp8-block"]["b_t_layers"]) == 2
    text = capsys.readouterr().out
    assert "loss - bf16" in text
    assert "+0.0000 +- 0.0000" in text


def test_no_run_begins_that_would_end_too_late(quality, tmp_path, capsys):
    path = tmp_path / "quality.json"
    quality("--device", "cpu", "--tiny", "--json", path, "--minutes", "0", "--arms", "bf16")
    assert "stopped before bf16 of seed 0" in capsys.readouterr().out
    assert not path.exists()


def test_texts_become_tokens(quality, tmp_path):
    pytest.importorskip("tokenizers")
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(f"the {i} cats and the {i % 7} dogs of number {i}" for i in range(300)))
    train, held_out = tmp_path / "train.npy", tmp_path / "held_out.npy"
    quality("--prepare", text, "--train", train, "--held-out", held_out, "--words", "300")
    ids, kept = np.load(train), np.load(held_out)
    assert ids.dtype == kept.dtype == np.uint16
    assert (ids == 0).sum() == 297  # an end for each document, of which every hundredth is held out
    assert (kept == 0).sum() == 3
    quality("--prepare", text, "--train", train, "--held-out", held_out, "--words", "300", "--tokens", "500")
    assert np.array_equal(np.load(train), ids[:500])


@pytest.mark.parametrize("arm", ["gauss:all", "gaussws", "bf16:all", "gaussws:all/x", "bf16/3"])
def test_unknown_arms(quality, arm):
    with pytest.raises(SystemExit, match="there is no arm"):
        quality("--device", "cpu", "--tiny", "--arms", arm)
