"""Estimated memory beside measured peaks of whole training steps at four sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.much_gpu_memory,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
CASES = (
    "134m:o1+fp8-current+input+one",
    "1b:o1+fp8-current+input+one",
    "3b:o1+fp8-current+input+none",
    "8b4:bf16-sr+fp8-current+input+none",
    "134m:o1+fp8-current+input+none+swiglu",
    "8b4:bf16-sr+fp8-block+swiglu",
)


@pytest.mark.parametrize("case", CASES)
def test_estimates_are_within_three_percent_of_peaks(case: str, tmp_path: Path) -> None:
    found = tmp_path / "memory.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    script = [sys.executable, str(ROOT / "benchmarks" / "memory.py"), "--cases", case, "--json", str(found)]
    result = subprocess.run(script, env=environment, capture_output=True, text=True)
    (row,) = json.loads(found.read_text())
    assert row["failure"] == "", result.stderr
    assert row["estimated"] == pytest.approx(row["measured"], rel=0.03)
