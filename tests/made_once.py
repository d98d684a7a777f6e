"""Folders of fixtures that take seconds to make, and that all processes of a test run share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make` fills: in the first process that asks for it, while others wait. No test may change it.

    Without it, each process of pytest-xdist that gets a test of a file would make the fixtures of that file again.
    """
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.with_suffix(".made").exists():
            folder.mkdir()
            make(folder)
            folder.with_suffix(".made").touch()
    return folder
