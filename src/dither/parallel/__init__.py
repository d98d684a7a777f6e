"""Train over many ranks: layouts, meshes, and the sharding of models."""

from dither.parallel.apply import gathered as gathered
from dither.parallel.apply import parallelize as parallelize
from dither.parallel.layout import DIMENSIONS as DIMENSIONS
from dither.parallel.layout import Layout as Layout
