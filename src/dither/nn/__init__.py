"""Layers in few bits, and the conversion of models to them."""

from dither.nn.convert import Conversion as Conversion
from dither.nn.convert import apply as apply
from dither.nn.convert import convert as convert
from dither.nn.linear import Linear as Linear
from dither.nn.linear import training_step as training_step
