"""Versions of Dither and of what its numbers depend on. Importing this does not import torch."""

import functools
import importlib.metadata
import importlib.util
import platform


def version() -> str:
    """Return the installed version of Dither.

    >>> version().count(".") >= 1 or "not installed" in version()
    True
    """
    try:
        return importlib.metadata.version("dither")
    except importlib.metadata.PackageNotFoundError:
        return "of this source tree, not installed"


@functools.cache
def has_triton() -> bool:
    """Return whether Triton, which the kernels are written in, is installed."""
    return importlib.util.find_spec("triton") is not None


def versions() -> tuple[tuple[str, str], ...]:
    """Return (name, version) of everything that numerical results depend on."""
    import torch

    triton_version = "not installed"
    if has_triton():
        import triton

        triton_version = str(triton.__version__)
    try:
        numpy_version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError:
        numpy_version = "not installed"
    return (
        ("dither", version()),
        ("Python", platform.python_version()),
        ("torch", torch.__version__),
        ("Triton", triton_version),
        ("numpy", numpy_version),
        ("CUDA", torch.version.cuda or "none: this torch is built without it"),
        ("platform", platform.platform()),
    )
