"""Layers in few bits, and the conversion of models to them."""

from dither.nn.convert import Conversion as Conversion
from dither.nn.convert import apply as apply
from dither.nn.convert import convert as convert
from dither.nn.guidance import bitwidth_loss as bitwidth_loss
from dither.nn.guidance import param_groups as param_groups
from dither.nn.guidance import sampling_parameters as sampling_parameters
from dither.nn.linear import Linear as Linear
from dither.nn.linear import training_step as training_step
