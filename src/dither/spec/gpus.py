"""GPUs with their memory and the rates of their data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from dither.errors import UserError, did_you_mean

GIB = 2**30

MARGIN, CONTEXT = 0.04, GIB
"""Fraction of a GPU's memory left to fragmentation, and bytes left to CUDA itself."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a CPU with `capability=None`. Rates are peaks: products are dense, and links count one direction."""

    name: str
    capability: tuple[int, int] | None
    memory: int
    """Memory in bytes."""
    bf16: float = 0.0
    """BF16 products, FLOP/s; 0 if it is not listed."""
    fp8: float | None = None
    """FP8 products, FLOP/s; None if there are no FP8 units."""
    bandwidth: float = 0.0
    """Memory bandwidth, bytes/s."""
    nvlink: float = 0.0
    """Bandwidth to the other GPUs of a node, bytes/s."""
    network: float = 0.0
    """Bandwidth of a GPU's share of the network between nodes, bytes/s."""
    cast_passes: float = 1.1
    """Time of casts over that of moving their bytes once; backward casts into two layouts. Fitted. Other libraries have other
    kernels."""

    @property
    def usable(self) -> int:
        """Return the bytes available to tensors."""
        return max(0, round(self.memory * (1 - MARGIN) - CONTEXT))

    def with_network(self, gigabits: float) -> "Gpu":
        """Return this GPU with a network of that many Gbit/s per GPU.

        >>> gpu_named("h100").with_network(200).network
        25000000000.0
        """
        if not gigabits > 0:
            raise UserError(f"A network has a positive number of Gbit/s per GPU, such as 400, not {gigabits:g}.")
        return replace(self, network=gigabits * 1e9 / 8)


def _gpus(*rows: tuple[str, tuple[int, int], float, dict[str, float]]) -> Mapping[str, Gpu]:
    return MappingProxyType(
        {name.lower(): Gpu(name, capability, round(gib * GIB), **rates) for name, capability, gib, rates in rows}
    )


GPUS = _gpus(
    ("V100-32GB", (7, 0), 32, {}),
    ("T4", (7, 5), 15, {}),
    ("A100-40GB", (8, 0), 40, {}),
    ("A100-80GB", (8, 0), 80, {"bf16": 312e12, "bandwidth": 2.039e12, "nvlink": 300e9, "network": 25e9}),
    ("A40", (8, 6), 45, {}),
    ("RTX-3090", (8, 6), 24, {}),
    ("L4", (8, 9), 22.5, {"bf16": 121e12}),
    ("L40S", (8, 9), 45, {"bf16": 362e12}),
    ("RTX-4090", (8, 9), 24, {}),
    ("H100-80GB", (9, 0), 80, {"bf16": 989e12, "fp8": 1979e12, "bandwidth": 3.35e12, "nvlink": 450e9, "network": 50e9}),
    ("H200", (9, 0), 140, {"bf16": 989e12, "fp8": 1979e12, "bandwidth": 4.8e12, "nvlink": 450e9, "network": 50e9}),
    ("B200", (10, 0), 180, {"bf16": 2250e12, "fp8": 4500e12, "bandwidth": 8.0e12, "nvlink": 900e9, "network": 50e9}),
    ("RTX-5090", (12, 0), 32, {}),
)
"""GPUs by name, with compute capability and approximately the memory that CUDA reports. Rates are those of SXM modules in
NVIDIA's data sheets; networks are those of its DGX servers, 200 (A100) and 400 Gbit/s per GPU."""


def gpu_named(name: str, *, rated: bool = False) -> Gpu:
    """Return the GPU of that name, ignoring case. The memory may be left out, and is then that of the GPU with rates.

    Args:
        name: The name, such as H200, H100-80GB or H100.
        rated: Accept only GPUs all of whose rates are listed.

    >>> gpu_named("a100-40gb").name, gpu_named("A100").name, gpu_named("v100").name
    ('A100-40GB', 'A100-80GB', 'V100-32GB')
    >>> gpu_named("h300", rated=True)
    Traceback (most recent call last):
    dither.errors.UserError: There is no GPU 'h300' (did you mean 'h200'?) in the list: a100, h100, h200, b200.
    """
    known = {key: gpu for key, gpu in GPUS.items() if gpu.network or not rated}
    listed_last = sorted(known.items(), key=lambda item: item[1].network > 0)
    short = {key.partition("-")[0]: gpu for key, gpu in listed_last if not key.startswith("rtx")}
    if (found := known.get(name.lower()) or short.get(name.lower())) is not None:
        return found
    names = list(short) if rated else [gpu.name for gpu in known.values()]
    hint = did_you_mean(name.lower() if rated else name, names)
    raise UserError(f"There is no GPU {name!r}{hint} in the list: {', '.join(names)}.")


def bf16_peak(name: str) -> float | None:
    """Return the FLOP/s of BF16 products of a GPU, by the name that CUDA has for it; None if it is not listed.

    >>> bf16_peak("NVIDIA H100 80GB HBM3"), bf16_peak("NVIDIA L40S"), bf16_peak("NVIDIA L4"), bf16_peak("Tesla T4")
    (989000000000000.0, 362000000000000.0, 121000000000000.0, None)
    """
    peaks = {gpu.name.partition("-")[0]: gpu.bf16 for gpu in GPUS.values() if gpu.bf16}
    # The longest name first: an L40S is not an L4.
    return next((peaks[part] for part in sorted(peaks, key=len, reverse=True) if part in name), None)
