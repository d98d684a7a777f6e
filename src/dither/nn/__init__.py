"""Layers in few bits, and the conversion of models to them."""

from dither.nn.bitwidths import EffectivePrecision as EffectivePrecision
from dither.nn.bitwidths import bitwidth_loss as bitwidth_loss
from dither.nn.bitwidths import effective_precision as effective_precision
from dither.nn.bitwidths import param_groups as param_groups
from dither.nn.bitwidths import sampling_parameters as sampling_parameters
from dither.nn.compile import GraphedPasses as GraphedPasses
from dither.nn.compile import capture_passes as capture_passes
from dither.nn.compile import compile_blocks as compile_blocks
from dither.nn.convert import Conversion as Conversion
from dither.nn.convert import convert as convert
from dither.nn.frozen import FrozenLinear as FrozenLinear
from dither.nn.frozen import freeze_base as freeze_base
from dither.nn.frozen import thaw_base as thaw_base
from dither.nn.layers import Conv1D as Conv1D
from dither.nn.layers import GatedMLP as GatedMLP
from dither.nn.linear import Linear as Linear
from dither.nn.step import step_context as step_context
from dither.nn.stored import StoredLinear as StoredLinear
from dither.nn.stored import restore_weights as restore_weights
from dither.nn.stored import store_weights as store_weights

compile = compile_blocks
