"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is imported."""

import os

import pytest
import torch

# Inductor remembers graphs without asking whether an operator's outputs are still laid out as they were.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Ignore hints about speed. In pyproject.toml this would import dither, and with it triton, before the choice above."""
    config.addinivalue_line("filterwarnings", "ignore::dither.errors.PerformanceWarning")


@pytest.fixture
def device() -> str:
    """Where kernels run in this session: CUDA, or the CPU through the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"
