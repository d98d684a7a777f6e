"""Train over many ranks: layouts, meshes, and the sharding of models."""

from typing import TYPE_CHECKING

from dither.lazy import lazily
from dither.parallel.layout import DIMENSIONS as DIMENSIONS
from dither.parallel.layout import Layout as Layout

if TYPE_CHECKING:
    from dither.parallel.apply import gathered as gathered
    from dither.parallel.apply import parallelize as parallelize

# A layout alone needs no models, which need safetensors.
__getattr__ = lazily(__name__, {"apply": "gathered parallelize"})
