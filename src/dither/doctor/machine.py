"""The devices that torch finds on this machine."""

import os
import platform
from dataclasses import dataclass

import torch


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
