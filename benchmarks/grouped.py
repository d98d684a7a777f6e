"""Grouped products of experts: torch's in BF16 beside those in FP8 with a scale per row, without casts.

    PYTHONPATH=src python3 benchmarks/grouped.py            # on a GPU of compute capability 9.0

Times are those of the three products of a training step: forward, the gradient of the input, and that of the weight.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

SHAPES = ((64, 2048, 1408, 16384), (64, 2048, 1408, 65536), (16, 2048, 4096, 16384), (8, 4096, 14336, 16384))
"""Experts, their inputs and outputs, and rows of all experts together."""


def milliseconds(work: Callable[[], object], count: int = 20) -> float:
    """Return the mean time of a call on the GPU."""
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def numbers(*shape: int) -> Tensor:
    """Return normal numbers."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def main() -> None:
    """Print a row for each shape."""
    for experts, inputs, outputs, rows in SHAPES:
        x, dy, w = numbers(rows, inputs), numbers(rows, outputs), numbers(experts, outputs, inputs)
        ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
        operands = [(x, w.transpose(1, 2)), (dy, w), (dy.t(), x)]
        bf16 = [milliseconds(partial(torch._grouped_mm, a, b, ends)) for a, b in operands]
        fp8 = []
        for a, b in operands:  # FP8 units read both along the dimension that is summed over
            a8, b8 = (each.contiguous().to(torch.float8_e4m3fn) for each in (a, b.transpose(-1, -2)))
            groups = experts if b.dim() == 2 else 1  # a weight gradient has scales per row and expert
            lines = (groups * b.shape[-1],) if b.dim() == 2 else (experts, b.shape[-1])
            scales = torch.ones(groups * a.shape[0], device="cuda"), torch.ones(lines, device="cuda")
            scaled = partial(torch._scaled_grouped_mm, out_dtype=torch.bfloat16)
            fp8.append(milliseconds(partial(scaled, a8, b8.transpose(-1, -2), *scales, ends)))
        shown = [" ".join(f"{ms:.3f}" for ms in times) for times in (bf16, fp8)]
        print(f"{experts} experts of {inputs} x {outputs}, {rows} rows: BF16 {shown[0]} ms, FP8 {shown[1]} ms")


if __name__ == "__main__":
    main()
