"""Kept launches: what Triton is asked for once, and what is started again without it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton")

from dither.ops.triton import BoundKernel


class Kernel:
    """As much of a Triton kernel as a launch needs; it remembers what it was started with, and by whom."""

    arg_names = ("x_ptr", "out_ptr", "row", "rows", "EVEN", "TILE")

    def __init__(self) -> None:
        self.bound: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
        def bind(*arguments: Any, **constants: Any) -> "Kernel.Compiled":
            self.bound.append((grid, arguments, constants))
            return Kernel.Compiled(self)

        return bind

    class Compiled:
        def __init__(self, kernel: "Kernel") -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda *arguments: self.kernel.again.append((grid, arguments))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of a CPU tensor's device
    return Kernel()


def launch_of(kernel: Kernel) -> BoundKernel:
    return BoundKernel(kernel, 7, (64,), {"TILE": 128, "EVEN": True}, bits=(1,), num_warps=4)


def test_the_second_start_needs_no_triton(kernel: Kernel) -> None:
    launch, x, out = launch_of(kernel), torch.zeros(64), torch.zeros(64, dtype=torch.float8_e4m3fn)
    launch(x, out, 0)
    (((programs,), (first, codes, row, rows), constants),) = kernel.bound
    assert (programs, row, rows) == (7, 0, 64)
    assert first is x
    assert (codes.dtype, codes.data_ptr()) == (torch.uint8, out.data_ptr())  # bits of codes
    assert constants == {"TILE": 128, "EVEN": True, "num_warps": 4}
    other = torch.zeros(64)
    launch(other, out, 0)
    assert len(kernel.bound) == 1
    # All arguments in the order of the signature, constants included.
    ((grid, arguments),) = kernel.again
    assert grid == (7, 1, 1)
    assert arguments[0] is other
    assert arguments[1] is out
    assert arguments[2:] == (0, 64, True, 128)


def test_another_alignment_or_number_is_another_start(kernel: Kernel) -> None:
    launch, x, out = launch_of(kernel), torch.zeros(65), torch.zeros(64, dtype=torch.int16)
    launch(x[:64], out, 0)
    launch(x[1:], out, 0)  # 4 bytes beyond a multiple of 16
    launch(x[:64], out, 16)
    assert len(kernel.bound) == 3
    for given in ((x[:64], out, 0), (x[1:], out, 0), (x[:64], out, 16)):
        launch(*given)
    assert len(kernel.bound) == 3
    assert len(kernel.again) == 3


def test_numbers_without_end_do_not_fill_memory(kernel: Kernel) -> None:
    launch, x, out = launch_of(kernel), torch.zeros(64), torch.zeros(64, dtype=torch.int16)
    for row in range(1000):
        launch(x, out, row)
    assert len(kernel.bound) == 1000
    assert len(launch.compiled) <= 256
