"""GPUs with their data sheet rates, and the shares of these rates that kernels and links sustain."""

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from dither.errors import UserError
from dither.spec import did_you_mean
from dither.tools.memory import Shape
from dither.tools.recommend import GPUS, Advice, Gpu, advise


@dataclass(frozen=True)
class Device:
    """A device that tensors can be on."""

    name: str
    model: str
    capability: str
    memory: int
    """Bytes."""


def best_device() -> str:
    """Return "cuda" if torch finds a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def devices() -> tuple[Device, ...]:
    """Return the CPU and every GPU that torch finds."""
    memory = 0
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = [Device("cpu", f"{platform.machine()}, {os.cpu_count()} cores", "", memory)]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append(Device(f"cuda:{index}", properties.name, capability, properties.total_memory))
    return tuple(found)


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


CAST_PASSES = 1.1
"""Time of casts over that of moving their bytes once; backward casts into two layouts. Fitted."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A GPU in a server: its memory, and the peak rates of its data sheet. Products are dense, links count one direction."""

    gpu: Gpu
    bf16: float
    """BF16 products, FLOP/s."""
    fp8: float | None
    """FP8 products, FLOP/s; None if there are no FP8 units."""
    bandwidth: float
    """Memory bandwidth, bytes/s."""
    nvlink: float
    """Bandwidth to the other GPUs of a node, bytes/s."""
    network: float
    """Bandwidth of a GPU's share of the network between nodes, bytes/s."""
    cast_passes: float = CAST_PASSES
    """Time of casts over that of moving their bytes once; other libraries have other kernels."""

    @property
    def name(self) -> str:
        """Return the name of the GPU."""
        return self.gpu.name

    def with_network(self, gigabits: float) -> "Accelerator":
        """Return this GPU with a network of that many Gbit/s per GPU.

        >>> accelerator_named("h100").with_network(200).network
        25000000000.0
        """
        if not gigabits > 0:
            raise UserError(f"A network has a positive number of Gbit/s per GPU, such as 400, not {gigabits:g}.")
        return replace(self, network=gigabits * 1e9 / 8)


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {
        "a100": Accelerator(gpu=GPUS["a100-80gb"], bf16=312e12, fp8=None, bandwidth=2.039e12, nvlink=300e9, network=25e9),
        "h100": Accelerator(gpu=GPUS["h100-80gb"], bf16=989e12, fp8=1979e12, bandwidth=3.35e12, nvlink=450e9, network=50e9),
        "h200": Accelerator(gpu=GPUS["h200"], bf16=989e12, fp8=1979e12, bandwidth=4.8e12, nvlink=450e9, network=50e9),
        "b200": Accelerator(gpu=GPUS["b200"], bf16=2250e12, fp8=4500e12, bandwidth=8.0e12, nvlink=900e9, network=50e9),
    }
)
"""SXM modules by name, as in NVIDIA's data sheets; networks are those of its DGX servers, 200 (A100) and 400 Gbit/s per GPU."""

BF16_SHARE = 0.708
"""Share of the BF16 peak that large products sustain. Fitted: 700 TFLOP/s on an H200, where 4096^3 reaches 719."""

SMALL_SIDE = 90.0
"""A product of sides m, n, k takes 1 + SMALL_SIDE (1/m + 1/n + 1/k) times as long as its FLOPs. Fitted."""

FP8_SHARES = MappingProxyType({"tensor": (0.657, 0.657, 0.657), "block": (0.568, 0.568, 0.458)})
"""Shares of the FP8 peak for the forward product, the input gradient and the weight gradient. Measured on an H200: 1300
TFLOP/s with tensor scales, 1124 with 1 x 128 times 128 x 128, and 906 with 1 x 128 times 1 x 128."""

ATTENTION_SHARES = MappingProxyType({64: 0.327, 128: 0.475})
"""Shares of the BF16 peak of attention by width of a head. Measured on an H200: 323 and 470 TFLOP/s, forward and backward."""

COPY_SHARE = 0.875
"""Share of the memory bandwidth that a copy reaches. Measured on an H200: 4.2 of 4.8 TB/s."""

OPTIMIZER_SHARES = MappingProxyType({"o1": 0.80, "bf16-sr": 0.89, "8-bit": 0.426})
"""Optimizer steps as shares of a copy's bandwidth. Measured on an H200."""

LINK_SHARE = 0.8
"""Share of a link's bandwidth that collectives sustain. Assumed, not fitted."""

BESIDE = 1.25
"""Time of a pass's compute beside collectives, in a run over several GPUs, over its time on one GPU. Fitted on one published
run, 8B on 32 H200."""


def accelerator_named(name: str) -> Accelerator:
    """Return the GPU of that name, ignoring case.

    >>> accelerator_named("H200").bandwidth
    4800000000000.0
    >>> accelerator_named("h300")
    Traceback (most recent call last):
    dither.errors.UserError: There is no GPU 'h300' (did you mean 'h200'?) in the list: a100, h100, h200, b200.
    """
    if name.lower() not in ACCELERATORS:
        known = ", ".join(ACCELERATORS)
        raise UserError(f"There is no GPU {name!r}{did_you_mean(name.lower(), ACCELERATORS)} in the list: {known}.")
    return ACCELERATORS[name.lower()]
