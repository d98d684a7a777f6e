"""Properties of a device, in one place, so that tests can simulate another GPU."""

import torch

from dither.engines import Verified
from dither.versions import version


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, None for any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def describe(device: torch.device, engines: tuple[str, ...] = ()) -> Verified | None:
    """Return the record of a GPU on which these engines passed their self-test; None if the device is not a GPU."""
    capability = capability_of(device)
    if capability is None:
        return None
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return Verified(name, capability, torch.__version__, torch.version.cuda or "none", version(), engines)
