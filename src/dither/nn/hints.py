"""Warnings, given once, about settings that work but are slow."""

import functools
import time
import warnings

import torch
from torch import Tensor

from dither.errors import PerformanceWarning

SLOW = 4.0
"""Slowdown of a 16-bit product compared with float32 that leads to a warning."""

NO_GAIN = 1024
"""FP8 products with fewer inputs or outputs than this save less than casting their operands costs (H200: 0.89 of the speed of
BF16 with 768, 1.26 with 2048)."""


def slow_autocast(x: Tensor) -> None:
    """Warn if autocast multiplies in 16 bits on this CPU, which on many CPUs is hundreds of times slower than float32."""
    if x.device.type != "cpu" or not torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
        return
    if torch._C._len_torch_dispatch_stack():  # such as that of dither.optim, which multiplies in float32
        return
    _warn_of_autocast(torch.get_autocast_dtype("cpu"))


@functools.cache
def _warn_of_autocast(dtype: torch.dtype) -> None:
    if (times := slowdown(dtype)) >= SLOW:
        warnings.warn(
            f"Autocast to {dtype} makes products on this CPU about {times:.0f} times slower than in float32: remove it, or "
            "use dither.optim.training, which multiplies in float32 and rounds in the same way.",
            PerformanceWarning,
            stacklevel=5,
        )


def slowdown(dtype: torch.dtype) -> float:
    """Measure the time of a small product in `dtype` on this CPU, as a multiple of the time in float32."""
    seconds = []
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for operands in (torch.float32, dtype):
            a, b = torch.ones(32, 256, dtype=operands), torch.ones(256, 256, dtype=operands)
            a @ b
            began = time.perf_counter()
            for _ in range(3):
                a @ b
            seconds.append(time.perf_counter() - began)
    return seconds[1] / seconds[0]


def slow_engines(layers: list[tuple[int, int, tuple[str, ...], float]]) -> None:
    """Warn if most of a model's multiplications run no faster than in BF16 on its GPU.

    `layers` are (out_features, in_features, engines, share of the multiplications) of the layers with casts.
    """
    small = sum(share for out, into, engines, share in layers if "fp8" in engines[0] and min(out, into) < NO_GAIN)
    emulated = sum(share for _, _, engines, share in layers if not any("fp8" in engine for engine in engines))
    if max(small, emulated) > 0.5:
        why = (
            "have operands in formats that this GPU multiplies on BF16 units or in float32"
            if emulated > small
            else f"are in layers with fewer than {NO_GAIN} inputs or outputs, where casting takes longer than FP8 units save"
        )
        warnings.warn(
            f"{max(small, emulated):.0%} of the model's multiplications {why}: expect fewer tokens per second than with BF16.",
            PerformanceWarning,
            stacklevel=3,
        )
