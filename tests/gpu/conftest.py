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
        kept = deal(items, of)[number - 1]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def deal(items: list[pytest.Item], shares: int) -> list[list[pytest.Item]]:
    """Deal tests one by one, since slow ones are neighbours. One share has all that need much of the GPU's memory."""
    hands: list[list[pytest.Item]] = [[] for _ in range(shares)]
    large = [item for item in items if item.get_closest_marker("much_gpu_memory")]
    hands[0], loads = list(large), [12 * len(large)] + [0] * (shares - 1)  # each takes as long as twelve others
    for item in items:
        if item not in large:
            least = loads.index(min(loads))
            hands[least].append(item)
            loads[least] += 1
    return hands
