"""These tests spend their time compiling kernels, on one core: `make gpu-test JOBS=8` runs them in eight shares."""

import os

import pytest

TORCHS_OWN = [
    "ignore:Synchronization debug mode is a prototype feature:UserWarning",  # on asking for it
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",  # in the first backward pass
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # when a second block is compiled
]


@pytest.hookimpl(trylast=True)  # after -m has left out others
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let torch's own remarks pass. Keep share i of n, as DITHER_SHARE=i/n says; the rest is deselected, and counted so."""
    for item in items:
        for warning in TORCHS_OWN:
            item.add_marker(pytest.mark.filterwarnings(warning))
    if share := os.environ.get("DITHER_SHARE"):
        number, of = map(int, share.split("/"))
        kept = items[number - 1 :: of]  # slow ones are neighbours
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
