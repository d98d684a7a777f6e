"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before triton is imported."""

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sweeps import EVERYTHING, left_out

# Inductor remembers graphs without asking whether an operator's outputs are still laid out as they were.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

torch.set_num_threads(1)  # tensors of tests are so small that threads would only wait for each other

pytest_plugins = ["interpreter"]


def pytest_configure(config: pytest.Config) -> None:
    """Ignore hints about speed. In pyproject.toml this would import dither, and with it triton, before the choice above."""
    config.addinivalue_line("filterwarnings", "ignore::dither.errors.PerformanceWarning")
    warnings.warn = warn
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and runs under nohup leave it ignored
    os.fsync = lambda _: None  # no test cuts the power, and thousands of files would wait for the disk


def warn(message: Warning | str, category: type[Warning] | None = None, stacklevel: int = 1, *more: Any, **named: Any) -> None:
    """Call `warnings.warn`, unless a package that is neither dither nor torch announces that something of its own will change.

    A filter sees only the module that a warning is attributed to, which may be the caller's: ours. With the next release of
    such a package, tests would fail that have found nothing.
    """
    kind = type(message) if isinstance(message, Warning) else category or UserWarning
    caller = sys._getframe(1)
    package = caller.f_globals.get("__name__", "").partition(".")[0]
    ours = package in STRICT or "site-packages" not in caller.f_code.co_filename
    if ours or not issubclass(kind, DeprecationWarning | FutureWarning | PendingDeprecationWarning):
        _warn(message, category, stacklevel + 1, *more, **named)


STRICT = ("dither", "torch", "typing_extensions")
"""Packages whose deprecations are errors in tests; torch announces some by the decorator of typing_extensions."""
_warn = warnings.warn


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as exhaustive what `sampled` leaves out; with DITHER_EXHAUSTIVE also properties, which then try all examples."""
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
        if EVERYTHING and getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.exhaustive)
    for cases in sweeps.values():
        for item in left_out(cases) if len(cases) > 1 else ():  # one alone was asked for by its name
            item.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish() -> None:
    """Take modules and collected tests out of garbage collection: millions of objects that each collection would visit."""
    gc.collect()
    gc.freeze()


def gpu_tests_wanted(config: pytest.Config) -> bool:
    """Return whether tests/gpu is collected: there is a CUDA device, and `-m gpu` asks for it."""
    return torch.cuda.is_available() and "gpu" in config.getoption("markexpr").split()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave tests/gpu out unless it is wanted: to import and to skip its hundreds of tests would take its time."""
    return True if collection_path == Path(__file__).with_name("gpu") and not gpu_tests_wanted(config) else None


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say why tests/gpu is missing."""
    if gpu_tests_wanted(config):
        return None
    why = "`make gpu-test` runs it" if torch.cuda.is_available() else "there is no CUDA device"
    return f"tests/gpu is not collected: {why}"


@pytest.fixture
def device() -> str:
    """Where kernels run in this session: CUDA, or the CPU through the interpreter."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class UndoError(Exception):
    """Raised to undo what a test registered."""


@pytest.fixture
def registry_undone() -> Iterator[None]:
    """Undo what the test registers."""
    from dither.spec import registry

    with contextlib.suppress(UndoError), registry.registering("a test"):
        yield
        raise UndoError


@pytest.fixture
def quiet_numpy() -> Iterator[None]:
    """Let the interpreter of kernels, which computes with numpy, not warn of overflows and NaNs that are wanted."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of a few words to train on. No test may change them."""
    from runs import write_words

    return write_words(tmp_path_factory.mktemp("text"), documents=60, words=60)


@pytest.fixture(scope="session")
def report_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run with SNIP, GaussWS and the monitor, trained once for all tests of reports."""
    from made_once import made_once
    from report_runs import trained

    return made_once(tmp_path_factory, "report", trained) / "run"
