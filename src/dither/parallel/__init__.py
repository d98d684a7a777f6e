"""Train over many ranks: layouts, meshes, and the sharding of models."""

from typing import TYPE_CHECKING

from dither.parallel.layout import DIMENSIONS as DIMENSIONS
from dither.parallel.layout import Layout as Layout

if TYPE_CHECKING:
    from dither.parallel.apply import gathered as gathered
    from dither.parallel.apply import parallelize as parallelize


def __getattr__(name: str) -> object:
    """Import what shards models when it is asked for: a layout alone needs no models, which need safetensors."""
    if name not in ("gathered", "parallelize"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dither.parallel import apply

    return getattr(apply, name)
