"""Describe this machine for advice: its GPUs, and the speed of BF16 on its CPU."""

import os
import time

import torch

from dither.advice.memory import Shape
from dither.advice.recommendation import Advice, Gpu, advise

SMALL = {
    "tiny": Shape(width=128, layers=2, heads=4, feed_forward=384, vocab=256, key_value_heads=2),
    "llama-134m": Shape(width=768, layers=12, heads=12, feed_forward=2048, vocab=32000),
}
LARGE = {
    "llama-134m": SMALL["llama-134m"],
    "llama-1b": Shape(width=2048, layers=22, heads=32, feed_forward=5632, vocab=32000),
    "llama-3b": Shape(width=3072, layers=28, heads=24, feed_forward=8192, vocab=32000),
    "llama-8b": Shape(width=4096, layers=32, heads=32, feed_forward=14336, vocab=32000, key_value_heads=8),
}
"""Presets that `dither doctor` gives advice for, on a CPU and on a GPU; written out, so that only torch is needed."""

SIDE, TRIES = 192, 3
"""The product that measures BF16: SIDE^3 multiplications, the fastest of TRIES."""


def gpus_here() -> tuple[Gpu, ...]:
    """Return the GPUs that torch sees."""
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Gpu(properties.name, (properties.major, properties.minor), properties.total_memory))
    return tuple(found)


def cpu_here() -> Gpu:
    """Return this machine's CPU, with the memory of the machine."""
    pages = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return Gpu("cpu", None, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if pages else 0)


def bf16_slowdown() -> float:
    """Return the time of a BF16 product over that of a float32 one on this CPU."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(SIDE, SIDE, dtype=dtype)
        best = float("inf")
        for _ in range(TRIES):
            began = time.perf_counter()
            a @ a
            best = min(best, time.perf_counter() - began)
        times[dtype] = best
    return times[torch.bfloat16] / times[torch.float32]


def advice_here() -> Advice:
    """Return advice for this machine: for its GPUs, or else for its CPU."""
    gpus = gpus_here()
    if gpus:
        return advise(gpus, LARGE)
    return advise([cpu_here()], SMALL, bf16_slowdown=bf16_slowdown())
