"""These tests spend their time compiling kernels, on one core: `make gpu-test JOBS=8` runs them in eight shares."""

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep share i of n, as DITHER_SHARE=i/n says; the rest is deselected, and counted as such."""
    if share := os.environ.get("DITHER_SHARE"):
        number, of = map(int, share.split("/"))
        kept = items[number - 1 :: of]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
